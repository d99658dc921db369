"""`fully_async_main`: responses as they finish, on devices of the engines' own."""
