"""Token ids to text: a pure function of one response, and its Triton stage."""
