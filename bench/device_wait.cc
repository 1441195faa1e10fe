// An XLA FFI target that holds its device for a given time without using a core.
//
// A device does one thing at a time, whereas XLA's CPU client runs independent computations of one device at once. So each
// device has a time until which it is taken; a wait begins there, or now, whichever is later. The thread's timer slack is
// set to the least: the kernel's default of 50 us would be a large part of the waits that are of interest.

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
constexpr size_t kDevices = 256;

int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNanosecondsPerSecond + now.tv_nsec;
}

// Takes the device for `nanoseconds` from when it is free, and says when that ends.
int64_t TakeDevice(int32_t ordinal, int64_t nanoseconds) {
  static std::mutex lock;
  static std::array<int64_t, kDevices> taken_until{};
  std::lock_guard<std::mutex> held(lock);
  int64_t& until = taken_until[static_cast<size_t>(ordinal) % kDevices];
  return until = std::max(until, Now()) + nanoseconds;
}

void SleepUntil(int64_t nanoseconds) {
  thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  (void)slack;
  const timespec deadline{nanoseconds / kNanosecondsPerSecond, nanoseconds % kNanosecondsPerSecond};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) != 0) {
  }
}

// `work` is not read: XLA computes it so that the computation is too expensive to be run inline, at dispatch.
ffi::Error Wait(int32_t ordinal, ffi::AnyBuffer x, ffi::AnyBuffer work, ffi::Result<ffi::AnyBuffer> out,
                int64_t microseconds) {
  if (microseconds < 0) return ffi::Error::InvalidArgument("device_wait: microseconds must not be negative");
  SleepUntil(TakeDevice(ordinal, microseconds * 1000));
  if (out->untyped_data() != x.untyped_data()) std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PathwayDeviceWait, Wait,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("microseconds"));
