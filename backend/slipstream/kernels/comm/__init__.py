"""Operations of several ranks together."""
