//! Clients with other versions of the admin API, over the daemon's socket.

use kiyot_proto::{ADMIN_REVISION, admin, codec::Codec};
use kiyot_testkit::{Kiyot, Node};
use tonic::{Code, Request, Response, Status, client::Grpc, transport::Channel};

use crate::cell::{operator::admin::channel, options};

/// Makes a call with messages of another version.
pub(crate) async fn call<Q, R>(
    channel: &Channel,
    method: &str,
    request: Q,
) -> Result<Response<R>, Status>
where
    Q: prost::Message + 'static,
    R: kiyot_proto::bounds::Bounded + Default + 'static,
{
    let path = format!("/kiyot.admin.v1.Admin/{method}").parse().unwrap();
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    grpc.unary(Request::new(request), path, Codec::default()).await
}

/// Verifies O26.
#[tokio::test]
async fn clients_of_later_and_earlier_versions_are_answered() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let channel = channel(&kiyot).await;

    // A later client calls a method that the daemon does not have.
    let later: Result<Response<admin::CordonResponse>, _> =
        call(&channel, "FreezeCells", admin::CordonRequest {}).await;
    let later = later.unwrap_err();
    assert_eq!(later.code(), Code::Unimplemented, "{later:?}");
    let own = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "kiyot {own} has no method /kiyot.admin.v1.Admin/FreezeCells, only those of revision \
         {ADMIN_REVISION}: upgrade the daemon"
    );
    assert_eq!(later.message(), expected);

    // A later client sends fields that the daemon does not know. The fields of a pod stand for
    // them.
    let fields = admin::Pod { namespace: "default".to_owned(), attempt: 7, ..Default::default() };
    let version: Response<admin::VersionResponse> =
        call(&channel, "Version", fields).await.unwrap();
    let version = version.into_inner();
    assert_eq!((version.version.as_str(), version.revision), (own, ADMIN_REVISION));

    // An earlier client knows no field of the response.
    let _known: Response<admin::CordonRequest> =
        call(&channel, "Version", admin::VersionRequest {}).await.unwrap();

    // The daemon still answers.
    let backends: Response<admin::ListBackendsResponse> =
        call(&channel, "ListBackends", admin::ListBackendsRequest {}).await.unwrap();
    assert_eq!(backends.into_inner().backends.len(), 2);
}
