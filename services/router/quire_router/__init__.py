"""The router: Quire's public interface over HTTP and gRPC. It places requests on replicas, and follows each request
until its end. It knows no model and no torch."""
