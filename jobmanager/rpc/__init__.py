"""gRPC at the edge of the JobManager."""
