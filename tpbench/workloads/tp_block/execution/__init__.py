"""The layers, schedules and measurements of a block on a rank."""
