//! ALPN protocols and server names (SNI) of the gateway's port.

/// Enrolment: TLS without a client certificate, and a single call, `Enrol`. The agent is the HTTP/2
/// client.
pub const ENROL: &[u8] = b"kiyot-enrol/1";

/// The link: TLS with a client certificate, dialled by the agent. A control connection carries
/// length-delimited messages; on a bulk connection the agent is the HTTP/2 server. Version 1 used
/// HTTP/2 on both.
pub const CELL: &[u8] = b"kiyot-cell/2";

/// Downloads of the agent's program: TLS without a client certificate, and an HTTP/1.1 request,
/// which curl can make on any image.
pub const DOWNLOAD: &[u8] = b"http/1.1";

/// The DNS name in the certificate of every gateway. As SNI it selects enrolment or a control
/// connection.
pub const GATEWAY_NAME: &str = "gateway.kiyot.internal";

/// The second DNS name in the gateway's certificate. As SNI it selects a bulk connection: the
/// gateway must know the window sizes before it sends its first frame.
pub const BULK_NAME: &str = "bulk.gateway.kiyot.internal";
