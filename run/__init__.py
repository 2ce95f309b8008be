"""What all other folders use: configs, errors, hardware, files. No machine learning in here."""
