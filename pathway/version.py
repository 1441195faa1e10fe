"""The version of the distribution and of the wire protocol."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Raised whenever a message of `pathway.transport.messages` changes shape. Peers of another version are refused."""
