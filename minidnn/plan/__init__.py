"""Plans: what a policy decides about memory. Policies are pure functions, one file each; none touches a device."""
