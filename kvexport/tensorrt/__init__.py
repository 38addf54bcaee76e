"""What building and running TensorRT engines share: the machine, the plugin library, CUDA's runtime, TensorRT's log."""
