//! What is spoken on the gateway's one port.

/// Enrolment: without a client certificate, and nothing but `Enrol`. The agent is the HTTP/2
/// client.
pub const ENROL: &[u8] = b"kiyot-enrol/1";

/// The link: with a client certificate. The agent dials. On a control connection single messages
/// are spoken, on a bulk connection the agent is then the HTTP/2 server. In version 1 it was that
/// on both.
pub const CELL: &[u8] = b"kiyot-cell/2";

/// The name in the gateway's certificate, wherever the gateway is. Asked for by SNI it means
/// enrolment or a control connection.
pub const GATEWAY_NAME: &str = "gateway.kiyot.internal";

/// The gateway's other name. Asked for by SNI it means a bulk connection: the gateway must know
/// before its first frame how large its windows are to be.
pub const BULK_NAME: &str = "bulk.gateway.kiyot.internal";
