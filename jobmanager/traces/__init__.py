"""Traces: what took how long, told to a collector that speaks OpenTelemetry's protocol."""
