"""Models: what can be captured, where its weights are, and the decode step they drive."""
