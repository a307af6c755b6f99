"""How a finished fit chooses a temperature and a width on its validation rows."""
