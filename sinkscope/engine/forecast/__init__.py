"""What a measurement would read, hold and cost, found before any weights are loaded."""
