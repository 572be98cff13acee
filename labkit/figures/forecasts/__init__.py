"""What forecasts say, beside what was measured."""
