"""From events to what people read: summary, metrics, plots, report, comparison."""
