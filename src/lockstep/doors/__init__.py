"""The manners of other libraries, each a thin door to what Lockstep has."""
