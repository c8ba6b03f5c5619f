"""Request router: dialects, chat rendering, capture and routing (pure), and a thin daemon around them."""
