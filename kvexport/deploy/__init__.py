"""Files that deploy an artifact on serving platforms: Triton, Kubernetes and Ray Serve."""
