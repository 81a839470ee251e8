"""Tools and environments of other projects."""
