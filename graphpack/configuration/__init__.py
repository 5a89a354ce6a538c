"""Configuration: what the command line may leave out, from the environment, `graphpack.yaml` and defaults."""
