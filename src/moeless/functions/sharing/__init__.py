"""How much of each device a model may have beside others. Decides; moves nothing."""
