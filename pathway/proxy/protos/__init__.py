"""The protocol's messages, as .proto files (see `pathway.proxy.wire`)."""
