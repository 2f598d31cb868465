"""System checks: wrong configuration is found at start, not at the first message."""
