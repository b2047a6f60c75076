"""Speed, memory and survival, measured beside their peers in one run."""
