"""What a step takes, measured: memory, communication, time, FLOPs, anomalies."""
