"""The trainer: megatron-core on CPU and CUDA, one rank per process."""
