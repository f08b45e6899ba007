"""What the platform's processes share and say: boards, channels of tokens, messages."""
