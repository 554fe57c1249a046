"""Pure parts of vision: the feature cache's bookkeeping, batches by shape, number formats."""
