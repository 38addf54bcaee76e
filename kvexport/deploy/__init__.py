"""The files with which Triton, Kubernetes and Ray Serve serve an artifact."""
