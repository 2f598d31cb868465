"""Small projects as users have them, run by their own test runners in processes of their own."""
