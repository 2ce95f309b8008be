"""What every part uses and none is about: no machine learning in here."""
