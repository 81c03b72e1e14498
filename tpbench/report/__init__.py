"""From rows to what people read: tables of variants side by side. Knows no torch."""
