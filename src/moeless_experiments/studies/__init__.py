"""What several figures share: predictors made once, and held against the same tokens."""
