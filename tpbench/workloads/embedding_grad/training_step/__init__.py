"""What runs beside the exchange in a training step."""
