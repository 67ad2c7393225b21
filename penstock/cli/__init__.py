"""The command line."""

import os

# Read as gRPC is imported: it writes of handshakes that fail in words of its own, beside the message that says what to do.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
