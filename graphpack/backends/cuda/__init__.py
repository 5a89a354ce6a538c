"""The cuda backend: captured CUDA graphs, rebuilt through the driver without torch."""
