"""The IFRT proxy: JAX programs run unchanged on the cluster with `JAX_PLATFORMS=proxy` (docs/proxy.md).

The client is inside jaxlib; this is the server it speaks to. It keeps handles and specs, forwards program bytes, and is
itself a client of the scheduler: one session for each connection. It loads neither JAX nor XLA (design, section 10).
"""
