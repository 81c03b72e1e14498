"""The layers and schedules of a block on a rank."""
