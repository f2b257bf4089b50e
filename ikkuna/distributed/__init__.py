"""Training in several processes: who there is, what each of them measured, and how it becomes one."""
