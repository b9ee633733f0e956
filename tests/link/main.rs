//! The link: the gateway of the daemon against the home of the agent, in one process and without root.

mod kit;

mod admission;
mod bulk;
mod calls;
mod enrolment;
mod hostile;
mod reconnect;
