//! Fuzz targets: HTTP from clients and cells, made from any bytes.

use super::{
    body::{BodyRest, MAX_BODY_BYTES},
    head,
};

/// Parses HTTP heads of streams, and URLs.
///
/// # Panics
/// If a property does not hold.
pub fn head(bytes: &[u8]) {
    request(bytes);
    response(bytes);
    url(bytes);
}

/// Parses a request's head as a whole and byte by byte. The results must be the same.
fn request(bytes: &[u8]) {
    let whole = head::request(bytes, 0);
    if let Ok(Some(read)) = &whole {
        let again = head::request(&read.retargeted(bytes, "/other"), 0);
        assert!(
            matches!(
                &again,
                Ok(Some(again)) if again.target == "/other" && again.method == read.method
            ),
            "{again:?}"
        );
        let _ = read.token();
    }
    for end in 0..bytes.len() {
        match head::request(&bytes[..end], end.saturating_sub(1)) {
            Ok(None) => {}
            found => return assert_eq!(found, whole, "of the first {end} bytes"),
        }
    }
}

/// Parses a response's head, and follows its body to the end.
fn response(bytes: &[u8]) {
    let Ok(Some(head)) = head::response(bytes, 0) else { return };
    let body = &bytes[head.length..];
    let (mut whole, mut by_bytes) = (BodyRest::new(head.body), BodyRest::new(head.body));
    let taken = whole.take(body).len();
    assert!(taken <= body.len() && taken as u64 <= MAX_BODY_BYTES);
    let one_by_one = body
        .iter()
        .take_while(|byte| {
            !by_bytes.is_complete() && by_bytes.take(std::slice::from_ref(byte)).len() == 1
        })
        .count();
    assert_eq!((one_by_one, by_bytes.is_complete()), (taken, whole.is_complete()));
}

/// Parses the URL of a cell's streaming server, whose target must be a valid request target.
fn url(bytes: &[u8]) {
    let Some((port, target)) = std::str::from_utf8(bytes).ok().and_then(super::parse_cell_url)
    else {
        return;
    };
    assert_ne!(port, 0);
    let Ok(Some(head)) = head::request(b"POST /token HTTP/1.1\r\n\r\n", 0) else { return };
    let sent = head.retargeted(b"POST /token HTTP/1.1\r\n\r\n", &target);
    let read = head::request(&sent, 0);
    assert!(matches!(&read, Ok(Some(read)) if read.target == target), "{target:?}: {read:?}");
}
