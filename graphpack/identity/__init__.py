"""What an entry needs to find again: its weights, its layout, its environment. Never imports torch."""
