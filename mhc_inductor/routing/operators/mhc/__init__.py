"""mHC: pre, Sinkhorn, post and head."""
