"""The events of an online auction, made up from a seed (the Nexmark benchmark)."""
