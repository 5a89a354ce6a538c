"""The archive: an OCI image layout on disk, its record, and the checks a reader makes. Never imports torch."""
