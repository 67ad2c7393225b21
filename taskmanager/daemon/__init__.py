"""Parts of the TaskManager daemon that are neither slots nor RPC."""
