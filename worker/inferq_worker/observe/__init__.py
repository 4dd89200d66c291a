"""What an operator sees: metrics, logs, probes. Components return figures; the pipeline records them here."""
