"""Calls to TaskManagers, and what the machines say as messages: converts and decides nothing."""
