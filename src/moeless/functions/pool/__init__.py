"""The memory of one device: which instances it holds, loads and gives up."""
