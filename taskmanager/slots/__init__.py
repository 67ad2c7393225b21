"""Slots: which there are, who holds them, and the processes behind them."""
