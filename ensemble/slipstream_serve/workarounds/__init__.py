"""What tritonserver needs and a later version will not."""
