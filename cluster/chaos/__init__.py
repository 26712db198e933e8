"""Faults on a real cluster under load: scenarios, what is done, what every request heard, and what must hold after."""
